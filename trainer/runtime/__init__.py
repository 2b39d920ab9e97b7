"""What a worker's code runs on: devices and streams, compilation, CUDA graphs, signals, stacks."""
