"""dflashctl: the control plane. It runs on a laptop and never imports torch."""

__version__ = "0.1.0"
