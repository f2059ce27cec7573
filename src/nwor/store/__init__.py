"""Stores: how rows are moved, where they are staged, which pages lie over which."""
