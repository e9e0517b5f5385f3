"""The GPU path on a real GPU: ``check_*`` finds what is broken, ``speed_*`` measures the rest; ``run.sh`` runs all."""
