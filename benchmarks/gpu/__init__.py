"""The GPU path on a real GPU: ``check/`` finds what is broken, ``speed/`` measures the rest; ``run.sh`` runs both."""
