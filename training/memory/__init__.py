"""Memory known beforehand."""
