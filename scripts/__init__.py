"""The tool that turns pinned vLLM releases, a patch series and an overlay into wheels.

One module a concern, read in this order::

    pins -> fetch -> upstream -> series -> tree / export / edit -> wheel -> verify

`cli` holds the commands and no logic; `repository` is the only module that runs git.
"""
