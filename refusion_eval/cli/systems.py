from refusion_eval.cli import Json, print_json


def systems(as_json: Json = False) -> None:
    """List the published systems that --system names."""
    from refusion_eval.runs.model_args import published_systems

    published = published_systems().values()
    if as_json:
        columns = ("name", "label", "decoder", "pretrained", "adapter")
        print_json(columns, ([getattr(system, column) for column in columns] for system in published))
        return
    for system in published:
        checkpoint = system.pretrained or "no published checkpoint; give --model"
        adapter = f" + {system.adapter}" if system.adapter else ""
        print(f"{system.name:<16} {system.label:<22} {system.decoder:<16} {checkpoint}{adapter}")
