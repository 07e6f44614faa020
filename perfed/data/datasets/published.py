"""``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``: published files, found where they lie, else downloaded."""

from __future__ import annotations

import gzip
import os
import pickle
import socket
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlparse

import numpy as np

from perfed.data.datasets.base import Arrays, DatasetConfig, register
from perfed.data.datasets.files import BROKEN, digest, sha256, unreachable, writable
from perfed.errors import UserError, require


@dataclass(kw_only=True)
class Published(DatasetConfig):
    """A dataset of fixed files with published checksums, in torchvision's layout below data_root.

    Its fingerprint is made of the checksums: the same images are the same data wherever and however (.gz) they lie.
    """

    download: bool = field(default=True, metadata={"identity": False})
    folder: ClassVar[str]  # below data_root
    files: ClassVar[dict[str, str]]  # name -> md5, unpacked
    archive: ClassVar[tuple[str, str] | None] = None  # (name, md5) of the tar file that may lie in data_root instead
    torchvision: ClassVar[str]  # the class that downloads
    url: ClassVar[str]  # asked before the download, with a timeout

    def fingerprint(self, root: Path) -> str:
        self.find(root)
        return sha256(self.name, self.files)

    def find(self, root: Path) -> list[Path]:
        """The checked files, in the order of ``files``; fetched into ``root/folder`` when some are absent."""
        parts, above = Path(self.folder).parts, root.absolute().parts
        # data_root may also be the folder itself, or one on the way to it
        for k in [k for k in range(len(parts) + 1) if above[len(above) - k :] == parts[:k]]:
            home = root.joinpath(*parts[k:])
            found = [next((p for p in (home / name, home / f"{name}.gz") if p.is_file()), None) for name in self.files]
            for path, md5 in zip(found, self.files.values(), strict=True):
                if path is not None:
                    self.check(root, path, md5)
            if None not in found:
                return found
        self.fetch(root, root / self.folder)
        return self.find(root)

    def check(self, root: Path, path: Path, md5: str) -> None:
        try:
            actual = digest(path, root, "md5")
        except BROKEN as error:
            actual = f"not to be had: {error}"
        if actual != md5:
            what = f"{path} is damaged or not {self.name} ({path.stat().st_size:,} bytes; md5 {actual}; published {md5})"
            raise UserError("data_root", root, f"{what}: delete it to have it fetched again, or put a good copy there")

    def fetch(self, root: Path, home: Path) -> None:
        """Unpack the archive that lies in ``root``, else download, beside the goal and then renamed."""
        absent = f"{self.name} is not complete in {home}"
        where = "there" if self.archive is None else f"there, or {self.archive[0]} into data_root"
        advice = f"put its files {where}, or set data_root to the folder that holds {self.folder}, or take dataset=mnist5k (no download)"
        packed = self.archive is not None and (root / self.archive[0]).is_file()
        if packed:
            self.check(root, root / self.archive[0], self.archive[1])
        require(packed or self.download, "dataset.download", self.download, f"{absent}: true, or {advice}")
        require(writable(home), "data_root", root, f"{absent}, which cannot be written: {advice}")
        if not packed and (reason := unreachable(self.url)):
            raise UserError("data_root", root, f"{absent}, and {urlparse(self.url).hostname} does not answer ({reason}): {advice}")
        patience = socket.getdefaulttimeout()
        try:
            socket.setdefaulttimeout(30)  # torchvision sets none
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as beside:
                if packed:
                    with tarfile.open(root / self.archive[0]) as tar:
                        tar.extractall(beside, filter="data")
                else:
                    from torchvision import datasets

                    getattr(datasets, self.torchvision)(beside, download=True)
                for name in self.files:
                    os.replace(Path(beside, self.folder, name), home / name)
        except (OSError, RuntimeError, tarfile.TarError) as error:
            raise UserError("data_root", root, f"{absent}, and fetching it failed ({error}): try again, or {advice}") from error
        finally:
            socket.setdefaulttimeout(patience)


def _unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@register
@dataclass(kw_only=True)
class Mnist(Published):
    """Four IDX files: a header of 16 (images) or 8 (labels) bytes, then bytes."""

    name: str = "mnist"
    table2: ClassVar = (196, 34)
    folder: ClassVar = "MNIST/raw"
    files: ClassVar = {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }
    torchvision: ClassVar = "MNIST"
    url: ClassVar = "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz"
    labels: ClassVar = tuple("0123456789")

    def read(self, root: Path) -> Arrays:
        train, train_y, test, test_y = (np.frombuffer(_unpacked(path), np.uint8) for path in self.find(root))
        x = np.concatenate([train[16:], test[16:]]).reshape(-1, 1, 28, 28)
        return Arrays(x, np.concatenate([train_y[8:], test_y[8:]]).astype(np.int64), len(train_y) - 8, self.labels)


@register
@dataclass(kw_only=True)
class FashionMnist(Mnist):
    name: str = "fashion_mnist"
    table2: ClassVar = None
    folder: ClassVar = "FashionMNIST/raw"
    files: ClassVar = {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    }
    torchvision: ClassVar = "FashionMNIST"
    url: ClassVar = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/train-images-idx3-ubyte.gz"
    labels: ClassVar = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@register
@dataclass(kw_only=True)
class Cifar10(Published):
    """Pickled batches, train ones first, then test, then the class names."""

    name: str = "cifar10"
    table2: ClassVar = (68, 34)
    folder: ClassVar = "cifar-10-batches-py"
    files: ClassVar = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    }
    archive: ClassVar = ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")
    torchvision: ClassVar = "CIFAR10"
    url: ClassVar = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    labels: ClassVar = "labels"
    names: ClassVar = "label_names"

    def read(self, root: Path) -> Arrays:
        # unpickled only after find() has matched the published checksums
        *batches, meta = (pickle.loads(_unpacked(path), encoding="latin1") for path in self.find(root))
        y = np.concatenate([np.asarray(batch[self.labels], np.int64) for batch in batches])
        x = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        return Arrays(x, y, len(y) - len(batches[-1][self.labels]), tuple(meta[self.names]))


@register
@dataclass(kw_only=True)
class Cifar100(Cifar10):
    name: str = "cifar100"
    table2: ClassVar = None
    folder: ClassVar = "cifar-100-python"
    files: ClassVar = {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    }
    archive: ClassVar = ("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85")
    torchvision: ClassVar = "CIFAR100"
    url: ClassVar = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
    labels: ClassVar = "fine_labels"
    names: ClassVar = "fine_label_names"
