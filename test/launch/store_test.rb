# frozen_string_literal: true

require_relative "launch_case"

# The stores that torchrun hosts: who is let in, and from where.
class LaunchStoreTest < LaunchCase
  HELLO = "\\x00\\xce\\xf7\\x85\\x3c\\x0d\\x01\\x02\\x00\\x00"

  # What the hello of PyTorch 2.x is answered with, as a worker sees it.
  ASK = <<~RUBY
    require "socket"
    socket = TCPSocket.new(ENV.fetch("MASTER_ADDR"), ENV.fetch("MASTER_PORT").to_i)
    socket.write("#{HELLO}".b)
    puts socket.readpartial(100).unpack1("H*")
  RUBY

  # The addresses that listen on the master's port.
  LISTENERS = <<~RUBY
    port = format(":%04X", ENV.fetch("MASTER_PORT").to_i)
    found = %w[tcp tcp6].flat_map { |name| File.readlines("/proc/net/\#{name}") }.map(&:split)
    puts found.select { |line| line[1].end_with?(port) && line[3] == "0A" }.map { |line| line[1].delete_suffix(port) }.sort.join(" ")
  RUBY

  # A network namespace whose loopback interface has no IPv4, for the command that follows.
  ONLY_IPV6 = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip -4 addr flush dev lo && exec "$@"', "sh"].freeze

  LOOPBACK = "0100007F"
  LOOPBACK_V6 = "#{"0" * 24}01000000"

  def test_one_host_listens_to_itself_alone
    [["--standalone"], [], ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]].each do |flags|
      result = run_torchrun(*flags, *ruby(LISTENERS))
      assert_equal "#{LOOPBACK}\n", result.out, result.err
    end
  end

  def test_localhost_is_both_its_addresses
    result = run_torchrun("--master-addr=localhost", "--master-port=#{free_port}", *ruby(LISTENERS))
    assert_includes ["#{LOOPBACK_V6} #{LOOPBACK}\n", "#{LOOPBACK}\n"], result.out, result.err
    result = run_torchrun("--master-addr=localhost", "--master-port=#{free_port}", *ruby(ASK))
    assert_equal "01020000\n", result.out, result.err
  end

  def test_a_name_of_the_host_is_every_address
    name = Socket.gethostname
    skip "this host's name has no address" unless Addrinfo.getaddrinfo(name, nil).any?
    result = run_torchrun("--master-addr=#{name}", "--master-port=#{free_port}", *ruby(LISTENERS))
    assert_match(/\A0{8}(0{24})?\n\z/, result.out, result.err)
    result = run_torchrun("--master-addr=#{name}", "--master-port=#{free_port}", *ruby(ASK))
    assert_equal "01020000\n", result.out, result.err
  rescue SocketError
    skip "this host's name has no address"
  end

  def test_strangers_are_told_that_there_is_a_secret
    result = run_torchrun(*ruby(ASK), env: {"TDDP_STORE_SECRET" => "open sesame, please"})
    assert_equal "c25eedfe\n", result.out
    assert_match(/dropped client 127\.0\.0\.1:\d+: it did not prove that it knows the secret that is set here/, result.err)
  end

  def test_workers_inherit_the_secret
    result = run_torchrun(*shell("echo $TDDP_STORE_SECRET"), env: {"TDDP_STORE_SECRET" => "open sesame, please"})
    assert_equal "open sesame, please\n", result.out
  end

  def nodes(*secrets)
    port = free_port
    runs = secrets.each_with_index.map do |secret, rank|
      start("--nnodes=2", "--node-rank=#{rank}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{port}", *shell("echo $RANK"),
        env: {"TDDP_STORE_SECRET" => secret, "PET_RDZV_CONF" => nil})
    end
    runs.map { |run| yield run }
  end

  def test_nodes_meet_with_the_secret
    results = nodes("open sesame, please", "open sesame, please", &:finish)
    assert_equal ["0\n", "1\n"], results.map(&:out)
    results.each { |result| assert_code 0, result }
  end

  def test_a_node_with_another_secret_is_told_so_at_once
    results = nodes("open sesame, please", "open barley, please") do |run|
      @runs.index(run).zero? ? run.await(/its secret is not the one that is set here/, stream: :err) : run.finish
    end
    assert_code 1, results[1]
    assert_match(/the server's secret is another than TDDP_STORE_SECRET here/, results[1].err)
    @runs[0].signal(:INT)
    @runs[0].finish
  end

  # The whole way: torchrun's store, workers that use libtddp's client through Ruby.
  def test_training_processes_meet_with_the_secret
    skip "the extension is not built: rake compile" unless File.exist?("#{ROOT}/lib/torch_ddp/ext.so")
    code = <<~RUBY
      $LOAD_PATH.unshift(#{"#{ROOT}/lib".inspect})
      require "torch/distributed"
      Torch::Distributed.init_process_group("gloo", timeout: 30)
      sum = Torch.tensor([Torch::Distributed.get_rank + 1.0])
      Torch::Distributed.all_reduce(sum)
      puts sum.item
      Torch::Distributed.destroy_process_group
    RUBY
    bundle = ENV.slice("BUNDLE_GEMFILE", "RUBYOPT", "RUBYLIB")
    result = run_torchrun("--nproc-per-node=2", *ruby(code), env: bundle.merge("TDDP_STORE_SECRET" => "open sesame, please"), limit: 60)
    assert_equal "3.0\n3.0\n", result.out, result.err
    assert_empty result.err
  end

  def test_a_host_without_ipv4
    skip "a network namespace needs root and ip" unless system(*ONLY_IPV6, "true", out: File::NULL, err: File::NULL)

    [["--standalone"], [], ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-id=q", "--rdzv-endpoint=[::1]:29417"]].each do |flags|
      result = run_torchrun(*flags, *shell("echo $MASTER_ADDR"), command: [*ONLY_IPV6, BINARY])
      assert_code 0, result
      assert_equal "::1\n", result.out, flags
    end
  end
end
