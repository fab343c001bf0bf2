"""What everything else is written in: named-axis operations, units, formats, errors.

Import from the modules: each holds one noun.
"""
