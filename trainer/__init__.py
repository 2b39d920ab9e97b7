"""trainer: the data plane. It runs where the GPUs are and trains DFlash drafters."""
