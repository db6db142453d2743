"""Looks at decisions: receipts, log, shadow policies. Changes none."""
