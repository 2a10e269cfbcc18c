"""``moe-guide mesh``: print which ranks share what under given sizes, before any of them is started."""

from typing import Annotated

import typer

from guide_code.parallel.mesh import ParallelSizes, check_world_size, picture

app = typer.Typer(add_completion=False)


@app.command()
def mesh(
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas of the dense layers.")] = 1,
    cp: Annotated[int, typer.Option(help="Parts of each sequence.")] = 1,
    tp: Annotated[int, typer.Option(help="Parts of each dense matrix.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups of experts; may span dp x cp x tp.")] = 1,
    etp: Annotated[int, typer.Option(help="Parts of each expert's matrices.")] = 1,
    experts: Annotated[int | None, typer.Option(help="Number of experts, to see who holds which.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks that you have; checked against the sizes.")] = None,
) -> None:
    """Show which ranks share what: the mesh of the dense layers and, folded out of it, that of the experts."""
    try:
        sizes = ParallelSizes(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
        if ranks is not None:
            check_world_size(sizes, ranks)
        typer.echo(picture(sizes, experts))
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
