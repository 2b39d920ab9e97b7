"""The workers of a run and what joins them: threads, the channel, the sum of gradients, several nodes."""
