"""Decoding speed of this device, as ratios within one run: `refusion-eval bench`."""
