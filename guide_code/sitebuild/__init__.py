"""What the site needs besides MkDocs: executed notebooks, figures, self-hosted mathematics, link checks."""
