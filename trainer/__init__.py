"""trainer: the data plane. It runs where the GPUs are and trains DFlash drafters."""

__version__ = "0.1.0"
