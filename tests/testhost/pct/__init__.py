"""A stand-in for Proxmox VE's `pct`. A node has it as /usr/sbin/pct (node_init.py). Standard library only, Python >= 3.9.

It answers as pct of PVE 9 was recorded to (tests/data/pct-behaviour.json), word for word and code for code,
by driving the node's real LXC. `exec` replaces itself by lxc-attach, as the real one does. What it leaves out
is listed in tests/test_pct_conformance.py.
Perl's "at FILE line N." is part of some messages, since clients see it.
"""
