"""From a request to a record: checkpoints under a decoder, their settings, and the decoding of jobs in one process."""
