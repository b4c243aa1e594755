"""How fast decoding is on this device, as ratios measured in one run."""
