"""What torchrun and mpirun start, once for each rank: ``python -m jupyter_ddp.runtime.worker``.

It becomes two processes: the stub, which the launcher sees and which stays small, and its child, the rank, which runs
the cells. Both have a connection to the agent of their node.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from jupyter_ddp.launchers import rank_environment
from jupyter_ddp.runtime import stub
from jupyter_ddp.runtime.child import OwnChild, ask_nurse
from jupyter_ddp.runtime.link import BELL_SUFFIX, ORPHAN_EXIT_CODE, Bell, connect
from jupyter_ddp.runtime.wire import pack

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

SOCKETS: Final = "JUPYTER_DDP_SOCKETS"
NPROC: Final = "JUPYTER_DDP_NPROC"
MASTER: Final = "JUPYTER_DDP_MASTER"
NURSERY: Final = "JUPYTER_DDP_NURSERY"
"""Where a nurse listens that forks ranks, if there is one."""


def main(prepare: Callable[[], None] | None = None) -> int:
    """Connect, fork or have a nurse fork, and be the stub or the rank; return the process's exit code.

    `prepare` is what a rank does first that is forked here.
    """
    values = rank_environment(os.environ)
    rank, local_rank = int(values["RANK"]), int(values["LOCAL_RANK"])
    path = os.environ[SOCKETS].split(os.pathsep)[rank // int(os.environ[NPROC])]
    nursery = os.environ.get(NURSERY)
    for name in (SOCKETS, NPROC, MASTER, NURSERY):
        os.environ.pop(name, None)
    os.environ.update(values)
    try:
        sock = connect(path)
        sock.sendall(pack({"op": "hello", "role": "stub", "rank": rank, "pid": os.getpid()}))
    except OSError as error:
        print(f"rank {rank} cannot reach the agent of its run: {error}", file=sys.stderr)  # noqa: T201
        return ORPHAN_EXIT_CODE
    if nursery and (nursed := ask_nurse(nursery, {"path": path, "rank": rank, "local_rank": local_rank})):
        return stub.Stub(sock, rank, nursed).run()
    parent = os.getpid()
    child = stub.fork()
    if child:
        return stub.Stub(sock, rank, OwnChild(child)).run()
    sock.close()
    if prepare is not None:
        prepare()
    return be_rank(path, rank, local_rank, parent)


def be_rank(path: str, rank: int, local_rank: int, parent: int) -> int:
    """Be the rank; return the exit code.

    Args:
        path: The agent's socket.
        rank: Its number.
        local_rank: Its number on its instance.
        parent: The process with which it dies.
    """
    from jupyter_ddp.runtime.process import die_with_parent  # not in the stub

    die_with_parent(parent)
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    try:
        sock: socket.socket = connect(path)
    except OSError:
        return ORPHAN_EXIT_CODE
    from jupyter_ddp.runtime.rank import Rank

    process = Rank(sock, Bell(path + BELL_SUFFIX, rank), rank, local_rank)
    stub.unblock()
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
