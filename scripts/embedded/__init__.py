"""Makes the embedded model, in this order::

    python -m scripts.train_tokenizer  # at 568e4430: conserve/embedded/tokenizer.json
    python -m scripts.embedded.train RUN              # 54 minutes on two cores
    python -m scripts.embedded.export RUN             # conserve/embedded/model.safetensors
    python -m scripts.embedded.evaluate               # 500 held-out tasks, on vLLM

After a change of what is shipped, count up VERSION in conserve/embedded/__init__.py.
"""
