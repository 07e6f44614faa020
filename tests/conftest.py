"""Tests are tiny: one thread is the fastest, and keeps sums in one order.

The few long tests are dealt out to the beginnings of the workers' shares (``--dist worksteal`` cuts the list in equal parts), so that
no worker is left alone with one at the end.
"""

import signal
import threading

import torch

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it

torch.set_num_threads(1)

LONG = ("test_every_command_not_marked_long_is_executed", "test_the_study_from_the_command_line", "test_wheel_runs_from_another_directory")


def pytest_collection_modifyitems(items):
    long = [item for item in items if item.name.startswith(LONG)]
    items[:] = [item for item in items if item not in long]
    half = len(items) // 2
    items[half:half], items[:0] = long[::2], long[1::2]
