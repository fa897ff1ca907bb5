"""Measurements: fixed token-id workloads, run here and on other engines with the same weights in the same run."""
