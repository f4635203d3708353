# vitlab on a CPU and, with `docker run --gpus all`, on a GPU: the wheels of torch bring CUDA along.
#   docker build --tag vitlab .
#   docker run --rm --volume "$PWD:/work" vitlab fit --config t2t --name first
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt /src && useradd --create-home vitlab
USER vitlab
WORKDIR /work
ENTRYPOINT ["vitlab"]
CMD ["--help"]
