"""A process that lowers programs for an engine that starts; run by LoweringPool.

It has no GPU: it imports JAX while the engine loads weights, and lowers for the engine's device.
"""

import gc
import os
import signal
import sys
from multiprocessing.connection import Connection

import jax

from jaxserve.execution.lowering_job import make_table
from jaxserve.execution.lowering_messages import (
    LoweringFailed,
    LoweringJob,
    LowerProgram,
    ProgramLowered,
    receive_order,
    send,
)
from jaxserve.execution.programs import ProgramTable


def serve(connection: Connection) -> None:
    """Obey until the other end is gone, or an order fails, which the other end is told."""
    table, platform = None, ""
    while True:
        try:
            order = receive_order(connection)
        except (EOFError, OSError):
            return
        try:
            if isinstance(order, LoweringJob):
                table, platform = make_table(order), order.platform
            else:
                send(connection, ProgramLowered(_lower(table, order, platform)))
        except Exception as error:  # of tracing: anything; the engine then lowers by itself
            send(connection, LoweringFailed(f"{type(error).__name__}: {error}"))
            return


def _lower(table: ProgramTable | None, order: LowerProgram, platform: str) -> bytes:
    if table is None:
        raise ValueError("a job must come before its programs")
    program = table.step_program((order.kind, order.shape, order.mode))
    return program.export(platform)


def main(file_descriptor: int) -> None:
    """Serve the engine at the other end of a pipe; the terminal's signals are for that process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # it walks in vain over all that tracing keeps, and the process ends soon
    jax.devices()  # makes JAX's backend while there is no order yet
    serve(Connection(file_descriptor))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except OSError:
        pass  # the engine is gone
    os._exit(0)
