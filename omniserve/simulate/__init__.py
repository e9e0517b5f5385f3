"""The engine's scheduler and KV manager on a virtual clock: what a load would see on a device that need not be here."""
