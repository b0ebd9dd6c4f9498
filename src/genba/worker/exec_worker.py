"""A worker in a new interpreter, which imports the app itself: for apps that a fork would break.

`python -m genba.worker.exec_worker TARGET TITLE SLOT`, with the worker's socket, tokens and shared
memory on fds 3, 4 and 5.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import NoReturn

from genba.worker.load_app import load
from genba.worker.process import adopt_orphans, leave
from genba.worker.worker import main as run
from genba.worker.zygote import IMPORT_FAILED, set_title

FDS = (3, 4, 5)


def main(argv: list[str]) -> NoReturn:
    target, title, slot = argv[1:4]
    for fd in FDS:
        os.set_inheritable(fd, False)
    sock_fd, token_fd, memory_fd = FDS
    adopt_orphans()
    set_title(title)
    try:
        app = load(target)
    except BaseException:  # noqa: BLE001 - an app may also leave by sys.exit
        traceback.print_exc()
        leave(IMPORT_FAILED)
    code = 1
    try:
        run(app, int(slot), socket.socket(fileno=sock_fd), token_fd, memory_fd)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the last frame of the worker
        traceback.print_exc()
    leave(code)  # do not wait for threads of the app


if __name__ == "__main__":
    main(sys.argv)
