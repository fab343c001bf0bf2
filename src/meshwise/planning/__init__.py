"""The search for the best plan, and the reasons it gives."""
