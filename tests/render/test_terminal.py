"""When to colour, and what a closed or narrow stream does."""

import io
import os
import pty
import subprocess
import sys

import pytest

from dflashctl.render.terminal import Terminal


class Tty(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("tty", "environ", "colour"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),  # only when not empty, says no-color.org
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (False, {"CLICOLOR_FORCE": "1"}, True),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_colour(tty, environ, colour):
    stream = Tty() if tty else io.StringIO()
    terminal = Terminal.of(stream, environ)
    assert terminal.colour is colour
    assert terminal.style("x", "red") == ("\x1b[31mx\x1b[0m" if colour else "x")


def test_a_pipe_has_100_columns_and_is_not_live():
    terminal = Terminal.of(io.StringIO(), {})
    assert (terminal.columns, terminal.live) == (100, False)


@pytest.mark.parametrize(("has", "used"), [(80, 80), (200, 100), (20, 40)])
def test_a_terminal_has_its_own_width_up_to_100(has, used):
    parent, child = pty.openpty()
    try:
        os.set_blocking(parent, False)
        import fcntl
        import struct
        import termios

        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, has, 0, 0))
        with open(child, "w", closefd=False) as stream:
            assert Terminal.of(stream, {}).columns == used
    finally:
        os.close(parent)
        os.close(child)


def test_characters_that_the_stream_lacks_are_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii")
    Terminal(stream).print(["é…", "x"])
    assert raw.getvalue() == b"??\nx\n"


def test_a_reader_that_has_gone_is_no_error():
    code = (
        "import sys, time\nfrom dflashctl.render.terminal import stdout\n"
        "out = stdout(); sys.stdin.readline(); out.print('a'); out.print('b'); sys.exit(3 if out.closed else 4)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(20) == 3
    assert process.stderr.read() == b""
    process.stderr.close()
