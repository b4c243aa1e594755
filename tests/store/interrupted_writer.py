"""A run in a process of its own, to be killed: python interrupted_writer.py RUN_DIR NUM_ITEMS PAUSE_SECONDS."""

import sys
import time

from conftest import make_key, make_manifest, make_sample

from refusion_eval.store.run_store import RunStore


def main(run_dir, num_items, pause):
    with RunStore.open(run_dir, make_manifest()) as store:
        for item in range(num_items):
            stored = store.get(make_key(item))
            if stored is None or stored.error:
                error = "out of memory" if item % 7 == 3 and stored is None else None
                trace = [["forward", number, "plan", item, 0] for number in range(300)]
                sample = make_sample(item, text=f"text {item} " * 200, trace=trace)
                store.append(make_sample(item, text="", tokens=None, error=error) if error else sample)
                print(item, flush=True)
                time.sleep(pause)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
