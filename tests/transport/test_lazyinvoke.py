"""invoke is loaded when something of it is used, and not before."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import dflashctl.transport.ssh
import paramiko
assert "invoke.context" not in sys.modules, "invoke was loaded with paramiko"
import invoke
assert invoke.run("echo loaded", hide=True).stdout == "loaded\\n"
assert "invoke.context" in sys.modules
config = paramiko.SSHConfig.from_text("Match exec true\\n  User matched\\nHost *\\n  User other\\n")
assert config.lookup("host")["user"] == "matched"
"""


def test_invoke_loads_when_it_is_used() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
