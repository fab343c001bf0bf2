"""The page: each verb's answer in the browser, drawn on the server from a link that is a command.

Not here: what a verb does (`commands`) and what its report says (`report`). Needs the extra `meshwise[web]`.
"""
