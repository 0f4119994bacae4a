"""Looking inside: what a model compiles to, and whether it computes what eager computes.

``explain``    the plan of a model, made without weights or a GPU
``fakes``      a model and its inputs without data
``run``        compiled against eager over many prompts
``compare``    two results, tensor by tensor and bit by bit
``lengths``    prompt lengths from a file
``doctor``     what is installed, and what is slower or off because of it
``reasons``    what each reason code means, and what would remove the break
``errors``     which errors are the user's to mend
``screen``     all of it for a terminal
"""
