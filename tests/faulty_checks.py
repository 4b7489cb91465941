"""Checks for lab.bench.gpu that raise, die and hang."""

import os
import signal
import time


def broken(bench):
    raise RuntimeError("no\nsuch kernel")


def dies(bench):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(bench):
    bench.report({"share": 0.5})
    time.sleep(600)


def short(bench):
    return {"share": 0.123456}, False


def right(bench):
    return {"of": bench.tokenizer}, True
