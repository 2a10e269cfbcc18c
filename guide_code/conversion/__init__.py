"""Checkpoints read and written tensor by tensor; the door to it is ``guide_code.convert``."""
