from refusion_eval.cli import Data, Json, print_json


def doctor(data: Data = None, as_json: Json = False) -> None:
    """Report what this machine can do. It lists versions, devices, the sandbox, tasks, data and the lm_eval hook."""
    from refusion_eval.doctor import report

    facts = report(data)
    if as_json:
        print_json(("name", "found"), facts)
        return
    for name, text in facts:
        print(f"{name}: {text}")
