"""The command line: builds each verb's options from its requests, and prints its answer.

Not here: what a verb does (`commands`) and what a report looks like (`report`).
"""
