# What an unsupported system lacks, said before a compiler says it a hundred times. As a script: cmake -DCMAKE_SYSTEM_NAME=... -P
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "torch-ddp cannot be built on ${CMAKE_SYSTEM_NAME}: it needs Linux's epoll, eventfd, signalfd, futex, "
    "memfd_create and prctl. Elsewhere use it in a container: examples/docker in its repository.")
endif()
