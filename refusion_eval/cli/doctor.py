from refusion_eval.cli import Data, Json, print_json


def doctor(data: Data = None, as_json: Json = False) -> None:
    """Report what this machine can do. It lists versions, devices, the sandbox, tasks, data and the lm_eval hook."""
    from refusion_eval.doctor import report

    found = report(data)
    if as_json:
        print_json(("name", "found"), found)
        return
    for name, text in found:
        print(f"{name}: {text}")
