# vitlab on a CPU and, with `docker run --gpus all`, on a GPU: the wheels of torch bring CUDA along.
#   docker build --tag vitlab .
#   docker run --rm --user "$(id -u)" --volume "$PWD:/work" vitlab fit --config t2t --name first
FROM python:3.12.12-slim-bookworm
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt /src \
    && useradd --create-home vitlab \
    && install --directory --owner vitlab /work
ENV HOME=/tmp
USER vitlab
WORKDIR /work
ENTRYPOINT ["vitlab"]
CMD ["--help"]
