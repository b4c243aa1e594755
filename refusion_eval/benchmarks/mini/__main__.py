"""`python -m refusion_eval.benchmarks.mini [DIR]`: writes the mini test files (default: tasks/mini)."""

import sys
from pathlib import Path

from refusion_eval.benchmarks.mini.generate import write_test_files

if __name__ == "__main__":
    write_test_files(Path(sys.argv[1] if len(sys.argv) > 1 else "tasks/mini"))
