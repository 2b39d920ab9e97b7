"""What pct says, and how it gives up."""

import os

PERL_FILE = "/usr/share/perl5/PVE/CLI/pct.pm"


class Die(Exception):
    """Perl's die: message on stderr, exit code."""

    def __init__(self, message, code=255):
        super().__init__(message)
        self.message = message if isinstance(message, bytes) else message.encode()
        self.code = code


def err(message):
    os.write(2, message if isinstance(message, bytes) else message.encode())
