"""Results in the formats of others, and runs in trackers: each file writes one format from the same `ExportedTask`s."""
