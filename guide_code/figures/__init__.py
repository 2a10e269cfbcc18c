"""The figures of the guide, one module each: `ALT`, `LAYOUTS` and `draw(palette, layout)`."""
