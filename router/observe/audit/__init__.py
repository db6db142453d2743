"""Observers of decisions: receipts, decision log, shadow policies. Changes no decision."""
