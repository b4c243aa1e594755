from refusion_eval.cli import Data


def doctor(data: Data = None) -> None:
    """Report what this machine can do: versions, device, attention, sandbox, tasks, data, the lm_eval hook."""
    from refusion_eval.doctor import report

    for line in report(data):
        print(line)
