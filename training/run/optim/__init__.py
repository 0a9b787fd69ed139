"""What changes weights: the learning-rate schedule and the moving average."""
