"""`python -m dflashctl`."""

from dflashctl.cli.app import main

main()
