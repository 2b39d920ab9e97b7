"""Chat text to token ids and loss masks, on disk and in batches."""
