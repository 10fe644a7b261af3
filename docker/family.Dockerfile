# syntax=docker/dockerfile:1
# An image for one family of models, on top of the one for GPUs: it is built only if that image can train the family.
# docker-bake.json has the families, and gives the image below as `base`.
# hadolint ignore=DL3006
FROM base
ARG MODEL_TYPES
LABEL io.miles-async.model-types="${MODEL_TYPES}"
WORKDIR /opt/miles-async
COPY --chown=miles docker/check_family.py docker/
RUN python docker/check_family.py "${MODEL_TYPES}"
USER 1000
