def systems() -> None:
    """List the published systems that --system names."""
    from refusion_eval.runs.model_args import published_systems

    for system in published_systems().values():
        checkpoint = system.pretrained or "no published checkpoint; give --model"
        adapter = f" + {system.adapter}" if system.adapter else ""
        print(f"{system.name:<16} {system.label:<22} {system.decoder:<16} {checkpoint}{adapter}")
