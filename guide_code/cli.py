"""The command ``moe-guide``: entry points by name, each imported only when it is called."""

import importlib

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Understand, run and copy Mixture-of-Experts Transformers.",
)
_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_FORWARD, add_help_option=False)
def train(context: typer.Context) -> None:
    """Train a model on text and keep metrics and checkpoints in a folder."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def generate(context: typer.Context) -> None:
    """Continue a prompt with a trained model, streaming to the terminal."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def models(context: typer.Context) -> None:
    """List the presets: parameters, operations per token, cache per token, and bytes of the weights."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def conventions(context: typer.Context) -> None:
    """Compare the load-balancing conventions: values, directions, and coefficients of equal pressure."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def images(context: typer.Context) -> None:
    """Draw the figures, publish them to a hub dataset, and check what the site uses."""
    _call(context, "images_cli")


@app.command(context_settings=_FORWARD, add_help_option=False)
def convert(context: typer.Context) -> None:
    """Convert a checkpoint between transformers and this package, resumably."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def verify(context: typer.Context) -> None:
    """Compare a checkpoint here and in transformers, layer by layer."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Time the experts here, in transformers, and the floors."""
    _call(context)


@app.command(context_settings=_FORWARD, add_help_option=False)
def mesh(context: typer.Context) -> None:
    """Show which ranks share what under given sizes of parallelism."""
    _call(context, "parallel.mesh_cli")


@app.command(context_settings=_FORWARD, add_help_option=False)
def plan(context: typer.Context) -> None:
    """Plan a run: memory, traffic and time per rank, and which layouts fit."""
    _call(context, "planner.cli")


def _call(context: typer.Context, module: str | None = None) -> None:
    """Hand the arguments to the entry point, whose own options and help apply."""
    entry = importlib.import_module(f"guide_code.{module or context.info_name}")
    entry.app(args=context.args, prog_name=f"moe-guide {context.info_name}")


if __name__ == "__main__":
    app()
