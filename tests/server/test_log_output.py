"""Tests of server/cli/log_output.py and failures.py."""

import logging
import re
import sys

from server.cli.failures import tell
from server.cli.log_output import start_logging


def test_a_line_of_the_end_reaches_who_can_read_it_and_fails_nobody(capsys, monkeypatch):
    tell("the reason")
    assert capsys.readouterr().err == "jaxserve: the reason\n"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        tell("lost")
    tell("closed")


def test_logging_ends_with_its_block(capsys):
    with start_logging("info"):
        logging.getLogger("server.x").info("shown")
        logging.getLogger("server.x").debug("not shown")
    logging.getLogger("server.x").info("too late")
    line = r"INFO \d\d-\d\d \d\d:\d\d:\d\d server.x: shown\n"
    assert re.fullmatch(line, capsys.readouterr().err)
