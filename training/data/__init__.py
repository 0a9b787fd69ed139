"""From pictures to batches: reading, cutting, degrading, splitting, shards on disk, and the order of a run."""
